"""What command lines printed, charged and wrote before the code was rearranged; it must stay the same."""
