"""What torch itself does otherwise than autocast is documented, on any device."""
