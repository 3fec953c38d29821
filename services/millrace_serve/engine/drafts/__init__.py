"""Drafts of the MTP layer: proposed on the device, verified by the next step."""
