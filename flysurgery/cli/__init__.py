"""The command line: one file a verb, each of which parses its options and calls one room."""

from flysurgery.cli.app import main as main
