"""Who is served next: the bounded queue, fair shares, and the rates of tenants."""
