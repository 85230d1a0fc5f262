"""(written below)"""
