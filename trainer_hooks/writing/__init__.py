"""How a save gets to storage: each rank's files, in the order of the protocol."""
