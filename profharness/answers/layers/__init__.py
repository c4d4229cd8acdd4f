"""The attention of a program, layer by layer: its map, gates, benches and forecasts."""
