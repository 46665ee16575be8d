"""Known bugs of TorchScript: of `torch.jit.script`, `torch.jit.trace` and `torch.jit.freeze`."""
