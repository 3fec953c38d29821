"""The load client, `millrace bench serving`: the one bench that is shipped."""
