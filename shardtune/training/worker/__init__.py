"""What a task is: model, data and loss, driven a step at a time."""
