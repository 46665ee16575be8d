"""What torchax does otherwise than it documents."""
