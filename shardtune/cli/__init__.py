"""The command line: its commands, and how they end."""


def main() -> None:
    """Run the command line; signals are handled before its modules are imported: that takes tenths of a second."""
    from shardtune.cli.interrupt import handle_interrupts, stop_at_once

    handle_interrupts()
    stop_at_once()
    from shardtune.cli.commands import main as run

    run()
