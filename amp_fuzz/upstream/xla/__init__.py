"""Known bugs of XLA."""
