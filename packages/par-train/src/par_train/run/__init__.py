"""What keeps a training loop alive and knows no model: signals, lock, resume, metrics, progress, retention.

`Run` (run.py) is the public door. It takes the folder (lock, files, attempt), catches signals (stop), adds up what a
loop logs (line) and where its time goes (goodput), and hands finished lines to rank 0's records (metrics, progress,
trackers, the curve); `profile` merges the ranks' traces. `output` and `failure` say what a process has to say, once;
`stop`, `output` and `failure` are imported before torch.
"""
