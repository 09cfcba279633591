"""Ready policies for robots, by LeRobot's names: each is an adapter in one file, as one of your own would be."""
