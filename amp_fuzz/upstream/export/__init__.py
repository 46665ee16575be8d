"""What torch.export does otherwise than the program that it exports."""
