"""What a GPU does with any attention: its measured cells, and the model between them (docs/atlas.md)."""
