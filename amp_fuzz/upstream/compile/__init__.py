"""What torch.compile does otherwise than the program that it compiles."""
