HANG_S = 600.0  # a limit that only a hang exceeds, however busy the machine is; less than that of a test
