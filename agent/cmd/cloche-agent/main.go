// The program cloche-agent is process 1 of every sandbox. As /init of the
// initramfs it brings the machine up and then serves the agent protocol on
// its virtio port. With --listen it is an ordinary process that speaks the
// same protocol on a Unix socket, for tests.
package main

import (
	"flag"
	"fmt"
	"os"

	"cloche.dev/agent/internal/machine"
)

func main() {
	listen := flag.String("listen", "", "developer mode: serve on `unix:PATH` and leave the machine alone")
	root := flag.String("root-cgroup", "auto", "developer mode: cgroup2 `DIR` for commands, none, or auto")
	state := flag.String("state", "", "developer mode: keep services in `DIR`, and start what is there")
	version := flag.Bool("version", false, "print the version")
	flag.Parse()
	switch {
	case *version:
		fmt.Println(machine.Version)
	case *listen != "":
		if err := develop(*listen, *root, *state); err != nil {
			fmt.Fprintln(os.Stderr, "cloche-agent:", err)
			os.Exit(1)
		}
	case os.Getpid() == 1:
		run()
	default:
		fmt.Fprintln(os.Stderr, "cloche-agent: not process 1; use --listen unix:PATH")
		os.Exit(2)
	}
}
