// Reads a JSON list of TraceQL queries and prints, for each, the texts that Grafana's grammar finds wrong.
import { createRequire } from "node:module";
import { readFileSync } from "node:fs";

const require = createRequire(process.argv[2] + "/");
const { parser } = require("@grafana/lezer-traceql");

const wrong = (query) => {
  const found = [];
  parser.parse(query).iterate({
    enter: (node) => {
      if (node.type.isError) found.push(`at ${node.from}: ${query.slice(node.from, node.from + 30) || "the end"}`);
    },
  });
  return found;
};
console.log(JSON.stringify(JSON.parse(readFileSync(0, "utf8")).map(wrong)));
