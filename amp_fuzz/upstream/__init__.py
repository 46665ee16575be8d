"""Known bugs of torch and of compilers: what they explain, and how the reference imitates them."""
