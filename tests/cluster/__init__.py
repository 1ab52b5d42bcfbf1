"""The cluster: real workers on one store, disturbed at random moments, and what they leave judged.

`run` is the command. `driver` starts the processes, has them disturbed (`disturbances`), lets everything
settle and collects the history; `judge` says what of it must not be. `app` is what the workers run, by the
command line that users have; `client` is the process that starts, answers and cancels; `network` is what lies
between a worker and its server. Flows, testimony and half of the judgement are those of `tests/soak`.
"""
