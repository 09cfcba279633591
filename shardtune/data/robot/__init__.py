"""Robot data: episodes of frames, read from tables and LeRobot data sets."""
