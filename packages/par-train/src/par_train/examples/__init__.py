"""Complete programs on the packages of par, to read and to start from. Nothing imports them."""
