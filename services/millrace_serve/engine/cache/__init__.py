"""The pages: their holders, their content, and their memory."""
