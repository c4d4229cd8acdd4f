"""The attention calls of a program, layer by layer: map, matching, gates and regret."""
