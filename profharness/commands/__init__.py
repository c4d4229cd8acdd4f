"""The commands, one module each: declaration, answer, document and gates."""
