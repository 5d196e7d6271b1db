"""Style and script of the HTML report: no fonts, images or code from a network, light and dark."""

STYLE = """
:root{color-scheme:light dark;--bg:#f6f7f9;--card:#fff;--ink:#16191d;--soft:#5b6470;--line:#e2e6eb;--grid:#edf0f3;
--good:#13794a;--good-bg:#e2f4ea;--bad:#b3261e;--bad-bg:#fbe6e4;--warn:#8a5a00;--warn-bg:#fdf0d5;--ref:#16191d;
--equal:#8fa3b8;--c0:#d1242f;--c1:#0969da;--c2:#bf6c00;--c3:#8250df;--c4:#0f7b83;--c5:#b6308c}
@media(prefers-color-scheme:dark){:root{--bg:#0e1116;--card:#171b22;--ink:#e8ebef;--soft:#9aa4b0;--line:#2a303a;
--grid:#222832;--good:#5fd39a;--good-bg:#12301f;--bad:#ff8d85;--bad-bg:#3a1815;--warn:#f0c062;--warn-bg:#33270d;
--ref:#e8ebef;--equal:#5f7388;--c0:#ff7b72;--c1:#58a6ff;--c2:#f0a24a;--c3:#c297ff;--c4:#4cc9d0;--c5:#f083cf}}
*{box-sizing:border-box}
body{margin:0;background:var(--bg);color:var(--ink);font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif}
main{max-width:1180px;margin:0 auto;padding:28px 24px 56px}
h1{font-size:22px;margin:0;letter-spacing:-.01em}
h2{font-size:16px;margin:36px 0 12px}
h3{font-size:13px;margin:0 0 8px;color:var(--soft);font-weight:600}
header{display:flex;gap:16px;align-items:flex-start;justify-content:space-between;flex-wrap:wrap}
header p{margin:4px 0 0;color:var(--soft)}
.badge{font-weight:650;padding:2px 10px;border-radius:99px;font-size:13px;white-space:nowrap;display:inline-block}
header .badge{font-size:16px;padding:6px 16px}
.equal-v{color:var(--good);background:var(--good-bg)}
.mismatch-v,.failed-v{color:var(--bad);background:var(--bad-bg)}
.notrun-v{color:var(--warn);background:var(--warn-bg)}
.card{background:var(--card);border:1px solid var(--line);border-radius:12px;padding:16px 18px;
margin:12px 0;min-width:0}
.pair{display:grid;grid-template-columns:1fr 1fr;gap:12px}
.pair .card{margin:0}
@media(max-width:900px){.pair{grid-template-columns:1fr}}
.chart{width:100%;height:auto;display:block;overflow:visible}
.grid{stroke:var(--line);stroke-width:1}
.tick,.unit{fill:var(--soft);font-size:12.5px;font-variant-numeric:tabular-nums}
.curve path{fill:none;stroke:var(--c);stroke-width:1.8;stroke-linejoin:round}
.curve circle{fill:var(--c);stroke:none}
.curve.reference{--c:var(--ref)}
.curve.reference path{stroke-width:2.6;stroke-dasharray:1 5;stroke-linecap:round}
.curve.reference circle{display:none}
.curve.equal{--c:var(--equal)}
.curve.bound path{stroke:var(--soft);stroke-width:1.2;stroke-dasharray:6 4}
.c0{--c:var(--c0)}.c1{--c:var(--c1)}.c2{--c:var(--c2)}.c3{--c:var(--c3)}.c4{--c:var(--c4)}.c5{--c:var(--c5)}
.dim{opacity:.12}.hot path{stroke-width:3}
.cursor{stroke:var(--soft);stroke-width:1;opacity:0}
.legend{display:flex;flex-wrap:wrap;gap:4px 14px;margin:10px 0 0;font-size:13px;color:var(--soft)}
.legend span{display:inline-flex;align-items:center;gap:6px}
.legend i{width:18px;height:0;border-top:3px solid var(--c);display:inline-block;border-radius:2px}
.swatch{width:10px;height:10px;border-radius:3px;background:var(--c);display:inline-block;
margin-right:7px}
td.run{white-space:nowrap}td.remark{min-width:190px}
.legend .reference{--c:var(--ref)}.legend .reference i{border-top-style:dotted}
.legend .equal{--c:var(--equal)}.legend .bound{--c:var(--soft)}.legend .bound i{border-top:2px dashed var(--c)}
.scroll{overflow-x:auto}
table{border-collapse:collapse;width:100%;font-size:14px}
th{font-weight:600;color:var(--soft);text-align:left;font-size:12.5px;white-space:nowrap}
th,td{padding:7px 14px 7px 0;border-bottom:1px solid var(--line);vertical-align:top}
tr:last-child td{border-bottom:0}
td.n,th.n{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}
tbody tr[data-key]:hover{background:var(--grid)}
.diagnosis{border-left:4px solid var(--bad)}
.diagnosis h3{font-size:15px;color:var(--ink);margin-bottom:4px}
.diagnosis.notrun{border-left-color:var(--warn)}
.diagnosis dl,.facts{display:grid;grid-template-columns:max-content 1fr;gap:3px 16px;margin:8px 0 0;font-size:14px}
dt{color:var(--soft)}dd{margin:0;overflow-wrap:anywhere;min-width:0}
pre{font:12.5px/1.5 ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;white-space:pre-wrap;overflow-wrap:anywhere;
margin:8px 0 0;max-height:360px;overflow:auto}
.notes{padding-left:18px;margin:0}.notes li{margin:4px 0}
#tip{position:fixed;pointer-events:none;background:var(--card);border:1px solid var(--line);border-radius:8px;
padding:8px 10px;font-size:12.5px;box-shadow:0 4px 18px #0003;display:none;max-width:340px;z-index:9;
font-variant-numeric:tabular-nums}
#tip b{display:block;margin-bottom:2px}#tip div{display:flex;justify-content:space-between;gap:14px}
footer{margin-top:36px;color:var(--soft);font-size:13px}
@media print{body{background:#fff}.card{break-inside:avoid}}
"""

SCRIPT = """
(()=>{
const data=JSON.parse(document.getElementById('data').textContent);
const tip=document.getElementById('tip');
const digits=v=>v===0?'0':Math.abs(v)<1e-3?v.toExponential(1):v.toPrecision(8);
const show=v=>v===null||v===undefined?'-':typeof v==='number'?digits(v):v;
for(const chart of document.querySelectorAll('svg.chart')){
  const cursor=chart.querySelector('.cursor');
  const left=+chart.dataset.left,right=+chart.dataset.right,n=+chart.dataset.steps;
  const rows=data[chart.parentElement.dataset.chart];
  chart.addEventListener('mousemove',event=>{
    const box=chart.getBoundingClientRect(),scale=chart.viewBox.baseVal.width/box.width;
    const at=((event.clientX-box.left)*scale-left)/(right-left)*(n-1);
    const step=Math.max(0,Math.min(n-1,Math.round(at)));
    const x=left+step/Math.max(n-1,1)*(right-left);
    cursor.setAttribute('x1',x);cursor.setAttribute('x2',x);cursor.style.opacity=.6;
    tip.replaceChildren();
    const head=document.createElement('b');head.textContent='step '+step;tip.append(head);
    for(const row of rows.slice(0,14)){
      const line=document.createElement('div');
      const name=document.createElement('span'),value=document.createElement('span');
      name.textContent=row.label;value.textContent=show(row.values[step]);
      line.append(name,value);tip.append(line);
    }
    tip.style.display='block';
    tip.style.left=Math.min(event.clientX+16,innerWidth-tip.offsetWidth-8)+'px';
    tip.style.top=Math.min(event.clientY+16,innerHeight-tip.offsetHeight-8)+'px';
  });
  chart.addEventListener('mouseleave',()=>{tip.style.display='none';cursor.style.opacity=0});
}
for(const entry of document.querySelectorAll('tr[data-key]')){
  const group=entry.closest('section');
  const mark=on=>{for(const curve of group.querySelectorAll('.curve')){
    const mine=curve.dataset.key===entry.dataset.key;
    curve.classList.toggle('hot',on&&mine);
    curve.classList.toggle('dim',on&&!mine&&!curve.classList.contains('bound'));
  }};
  entry.addEventListener('mouseenter',()=>mark(true));
  entry.addEventListener('mouseleave',()=>mark(false));
}
})();
"""
