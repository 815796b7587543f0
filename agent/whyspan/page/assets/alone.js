// The entry of the file that `whyspan explain --html` writes: one request, its data beside it.

import { report } from "./request/report.js";

const data = document.getElementById("data");
const main = document.getElementById("main");
if (data && main) report(main, JSON.parse(data.textContent ?? ""), new AbortController().signal, { alone: true });
