"""The programs of others beside ours, in the same run: same load, same clients, same machine."""
