module cloche.dev/agent

go 1.25
