"""Services for experiments: Weights & Biases, MLflow, trackio, SwanLab, or a class of the user's own."""
