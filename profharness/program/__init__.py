"""The attention calls of a program: layer maps, matching of layers, gates and possible savings."""
