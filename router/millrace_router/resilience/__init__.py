"""What keeps one worker's failures from becoming everybody's.

budget.py     further attempts are bounded by the requests that there are
breaker.py    one worker: failures in a row, or too many of them, and it is left alone for a while
outliers.py   one worker against the others of its role: fails more, or answers later
health.py     both at work: whom the policy leaves out now, and why
hedge.py      a second attempt elsewhere when the first token is late
"""
