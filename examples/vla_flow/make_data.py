"""Record demonstrations of the point task as LeRobot data sets: what an expert does, disturbed now and then."""

import argparse
from pathlib import Path

from shardtune.data.robot.lerobot_writer import write_lerobot
from shardtune.evaluate.environments.point2d import Point2d
from shardtune.evaluate.environments.scripted import demonstrations


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "made")
    parser.add_argument("--episodes", type=int, default=800)
    args = parser.parse_args()
    environment = Point2d()
    for name, episodes, seed in (("demonstrations", args.episodes, 0), ("heldout", args.episodes // 20, 1)):
        recorded = demonstrations(environment, episodes, seed)
        write_lerobot(args.out / name, recorded, fps=environment.frames_per_second, robot_type="point")
        print(f"{args.out / name}: {episodes} episodes")


if __name__ == "__main__":
    main()
