"""`slora top`: the live feed of a server in a terminal."""
