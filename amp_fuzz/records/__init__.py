"""What is written down of runs and findings, and where: readable without torch."""
