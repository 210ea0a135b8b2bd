from aoquant.cli import run

run()
