"""What keeps one worker's failures from becoming everybody's."""
