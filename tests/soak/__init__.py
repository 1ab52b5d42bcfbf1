"""The soak: real processes under load, killed at random moments, and what they leave judged by another.

`kill` is the command. `driver` plays the rounds, `load` keeps the workers busy by what is `expected` of each
execution. `worker` is the process that is killed; `judge` is the one that looks at what is left: what was
`told` is held against it, and what would be left `undisturbed`. `flows` is what they play, in the world
`outside`; `testimony` is how they say what they saw. `tests/cluster` plays and judges with the same parts.
"""
