"""The rules, by what they are about. Each function gives the alerts of one group, or a part of them."""
