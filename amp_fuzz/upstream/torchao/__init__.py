"""Where torchao differs from its documentation."""
