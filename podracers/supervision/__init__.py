"""Threads, child processes and simulators: what watches over them and ends them."""
