"""Pictures of the boards for the guide, drawn from a recorded run of a local cluster."""
