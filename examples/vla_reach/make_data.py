"""Record demonstrations of the reaching task in MuJoCo, as a LeRobot v3 data set.

A scripted expert, who sees where everything is, moves the robot's hand to the ball. Half of its actions are disturbed
before they are done, and recorded as they were meant, so that the recordings hold how one gets back on course.

    made/demonstrations     1,720 episodes, some 16,000 frames of 48 x 48 pixels
    made/heldout            40 other episodes
"""

import argparse
import shutil
from pathlib import Path

from shardtune.data.robot.lerobot_writer import write_lerobot
from shardtune.evaluate.environments.reach import Reach
from shardtune.evaluate.environments.scripted import demonstrations

EPISODES, HELD_OUT = 1_720, 40
AXES = ("x", "y", "z")


def main() -> None:
    """Write both data sets, in place of those that are there."""
    parser = argparse.ArgumentParser(description="Record demonstrations of the reaching task.")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "made", help="directory to write to")
    parser.add_argument("--episodes", type=int, default=EPISODES)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    environment = Reach()
    for number, (name, episodes) in enumerate((("demonstrations", args.episodes), ("heldout", HELD_OUT))):
        folder = args.out / name
        shutil.rmtree(folder, ignore_errors=True)
        write_lerobot(
            folder,
            demonstrations(environment, episodes, seed=2 * args.seed + number),
            fps=environment.frames_per_second,
            action_names=AXES,
            state_names=AXES,
        )
        print(f"{folder}: {episodes:,} episodes")
    environment.close()


if __name__ == "__main__":
    main()
