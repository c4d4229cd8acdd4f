"""The attention problem: config grammar, FLOPs and bytes, backends and dispatch rules."""
