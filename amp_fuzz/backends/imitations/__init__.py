"""What backends do otherwise than documented, as the reference imitates it on request."""
