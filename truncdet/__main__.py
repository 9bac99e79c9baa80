"""`python -m truncdet`, for where the console command is not on the path."""

from truncdet._cli import main

main(prog_name="truncdet")
