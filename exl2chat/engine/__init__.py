"""What runs: tensors, the forward pass, sampling and the generators."""
