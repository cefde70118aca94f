"""This machine: GPUs and links, processes, ports, leftovers, the board that its users share."""
