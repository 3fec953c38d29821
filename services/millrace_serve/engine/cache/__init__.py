"""The pages: who holds them, what they contain, and their memory."""
