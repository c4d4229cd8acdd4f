"""The attention calls of a program, layer by layer: their map, matching, gates and regret."""
