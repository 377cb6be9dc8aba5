"""`forged demo`: elastic training on this machine, under kill -9, and the proof that it was right."""
