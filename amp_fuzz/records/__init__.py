"""The records of runs and findings, and where they are stored: readable without torch."""
