"""Memory that the GPUs of one host share, and kernels that read and write each other's with plain loads and stores."""
